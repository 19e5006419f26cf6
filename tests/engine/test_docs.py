"""Every block of README and docs that can run here runs as a reader would run it: page by page, in order.

The fast tier takes what a newcomer reads first. Engines compute in float32 here. A reader's engine, in bfloat16 and
compiled, prints the same as long as no printed token is near a tie, so the gaps between the best two logits are looked
at (`CLOSE`).

Python blocks of a page share their names, and all pages one engine of the shipped model unless they ask for settings of
their own. Commands that talk to ``localhost:8000`` talk to one server. `tests/unit/test_docs.py` checks the rest.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import inspect
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import httpx
import pytest
import vllm
from typer.testing import CliRunner
from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

import vllm_weir as weir
from tests.support.engines import DEFAULTS, EAGER, close_all, get_llm, quick_start, shut_down
from tests.support.machine import engine_processes, inductor, needs
from tests.support.markdown import ROOT, Block, blocks, commands, pages, split_environment
from tests.support.serve_parser import serve_parser
from tests.unit.server.routes.test_admin import gguf
from vllm_weir.cli.main import app
from vllm_weir.cli.serve import prepare
from vllm_weir.extraction.engine import VllmEngine

pytestmark = [pytest.mark.engine("server"), pytest.mark.timeout(900)]
FIRST = ("README.md", "docs/index.md", "docs/tutorial.md")
CHEAP = ("convert", "extract", "fit", "inspect", "sae", "version")
"""Subcommands of `weir` that are run as they stand."""
HERE = "http://localhost:8000"
NUMBER = r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?"
CLOSE = 0.25
"""A gap between two logits that bfloat16 may close: two steps between its numbers from 16 to 32, where the shipped
model's are. One of them is what both logits' own rounding moves, the other is for what was rounded before."""
COMPILED = dict(dtype="bfloat16", enforce_eager=False, in_process=False, env={"TORCHDYNAMO_DISABLE": "0"})
"""The engine as a reader has it."""
LOGGED = re.compile(r"(\(.*?\) )?(INFO|WARNING|ERROR) \d\d-\d\d ")
"""How lines of vLLM's log begin."""
QUIET = (
    *("kv_cache_memory_bytes", "max_model_len", "enforce_eager", "dtype"),
    *("disable_log_stats", "enable_prefix_caching"),
)
"""Options that docs, and `weir.extract`, name and tests choose: all pages have one engine."""


def runs(block: Block) -> bool:
    if block.not_run:
        return False
    return block.language == "python" or (block.language == "bash" and any(map(is_run, commands(block.text))))


def is_run(words: list[str]) -> bool:
    _, words = split_environment(words)
    return words[:1] == ["curl"] or (words[:1] == ["weir"] and words[1] in CHEAP)


def needs_server(page: Path) -> bool:
    return any(runs(block) and "localhost:8000" in block.text for block in blocks(page))


RUN = sorted((page for page in pages() if any(map(runs, blocks(page)))), key=needs_server, reverse=True)


class Greedy:
    """What greedy requests of a page were answered, each with the gaps between the best two logits of its tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers: list[tuple[str, list[float]]] = []
        add, step = LLMEngine.add_request, LLMEngine.step

        def add_with_logprobs(engine: Any, name: str, prompt: Any, params: Any, *args: Any, **more: Any) -> Any:
            if getattr(params, "temperature", 1) == 0:
                params = params.clone()
                params.logprobs = max(params.logprobs or 0, 2)
            return add(engine, name, prompt, params, *args, **more)

        def step_and_look(engine: Any) -> Any:
            outs = step(engine)
            finished = (out.outputs for out in outs if isinstance(out, RequestOutput) and out.finished)
            for choice in (choice for choices in finished for choice in choices if choice.logprobs):
                best = (sorted((one.logprob for one in token.values()), reverse=True) for token in choice.logprobs)
                self.answers.append((choice.text, [a - b for a, b, *_ in best]))
            return outs

        patch.setattr(LLMEngine, "add_request", add_with_logprobs)
        patch.setattr(LLMEngine, "step", step_and_look)

    def near_ties(self, shown: str) -> list[tuple[str, float]]:
        """The answers that are printed and have a token whose choice is rounding's."""
        shown = " ".join(shown.split())
        printed = ((" ".join(text.split()), min(gaps)) for text, gaps in self.answers)
        return [(text, gap) for text, gap in printed if text and text in shown and gap < CLOSE]


class Engines:
    """Stands in for ``vllm.LLM``: the same settings give the same engine."""

    def __init__(self, kind: Any, given: dict[str, Any]) -> None:
        self.kind, self.given = kind, given
        self.used: list[Any] = []
        self.own: list[Any] = []

    def __call__(self, model: str, **options: Any) -> Any:
        assert model == weir.demo_model(), f"docs use the shipped model, not {model}"
        options = {name: value for name, value in options.items() if name not in QUIET}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vllm, "LLM", self.kind)
            patch.delenv("WEIR_END_WITH_PARENT", raising=False)  # set by `weir.extract`, for other processes
            llm = get_llm(model, **options | self.given)
        self.used.append(llm)
        return llm

    def with_defaults(self, start: Any) -> Any:
        """The constructor of Weir's own class, for an engine that lives as long as its page."""

        def init(llm: Any, *args: Any, **options: Any) -> None:
            close_all()
            with quick_start():
                start(llm, *args, **DEFAULTS | {name: v for name, v in options.items() if name not in QUIET})
            self.own.append(llm)

        return init

    def clear(self) -> None:
        """Leave nothing of a page behind."""
        for llm in self.used:
            weir.clear_global(llm)
            for name in weir.list_vectors(llm):
                weir.unregister(llm, name)
            for info in weir.saes(llm):
                weir.unload_sae(llm, info.name)
        for llm in self.own:
            shut_down(llm)


@pytest.fixture
def surroundings(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[dict[str, Any]]:
    """The names that a page begins with; an empty directory with the files that docs take as given."""
    engines = Engines(vllm.LLM, getattr(request, "param", {}))
    with monkeypatch.context() as patch:
        for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **EAGER}.items():
            patch.setenv(name, value)
        patch.chdir(tmp_path)
        patch.setattr(weir.LLM, "__init__", engines.with_defaults(weir.LLM.__init__))
        patch.setattr(VllmEngine, "close", lambda self: None)
        patch.setattr(vllm, "LLM", engines)
        given_files(tmp_path)
        yield {"__name__": "__main__", "__builtins__": builtins}  # C code looks for them there
    engines.clear()


@pytest.fixture
def greedy(surroundings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Greedy:
    return Greedy(monkeypatch)


def given_files(folder: Path) -> None:
    """What docs do not make themselves: a control vector as other tools write it, and some texts."""
    (folder / "happy.gguf").write_bytes(gguf({f"direction.{k}": [0.5] * 256 for k in (2, 3)}))
    texts = ["Tom went to the garden.", "Anna took the boat out.", "The market was open."]
    (folder / "happy.txt").write_text("Tom was happy.\nAnna was happy.\n" * 5)
    (folder / "sad.txt").write_text("Tom was sad.\nAnna was sad.\n" * 5)
    (folder / "stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def page_case(page: Path) -> Any:
    name = str(page.relative_to(ROOT))
    marks = [needs(engine_processes)] if needs_server(page) else []
    return pytest.param(page, marks=marks if name in FIRST else [*marks, pytest.mark.thorough], id=name)


PAGES = list(map(page_case, RUN))


@pytest.mark.parametrize("page", PAGES)
def test_page(
    page: Path,
    surroundings: dict[str, Any],
    greedy: Greedy,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = request.getfixturevalue("weir_server") if needs_server(page) else None
    if server is not None:
        for name, value in {"URL": server.url, "API_KEY": server.api_key}.items():
            monkeypatch.setenv(f"WEIR_BASE_{name}" if name == "URL" else f"WEIR_{name}", value)
    read(page, surroundings, greedy, server)


@pytest.mark.thorough
@needs(inductor)
@pytest.mark.parametrize("surroundings", [COMPILED], indirect=True, ids=["compiled"])
@pytest.mark.parametrize("page", [ROOT / name for name in FIRST], ids=FIRST)
def test_page_on_an_engine_as_a_reader_has_it(page: Path, surroundings: dict[str, Any], greedy: Greedy) -> None:
    read(page, surroundings, greedy)


def read(page: Path, names: dict[str, Any], greedy: Greedy, server: Any = None) -> None:
    """Do what a page says, and compare what is printed with what it shows."""
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)
        said, ran = "", 0
        for block, after in zip(blocks(page), [*blocks(page)[1:], None], strict=True):
            shown = after is not None and after.note == "output"
            if block.note == "output":
                check_output(block, said)
                assert not greedy.near_ties(block.text), f"{block.place}: an engine in bfloat16 may print another text"
            elif runs(block):
                said = run(block, names, server, loop, may_fail=shown)
                ran += 1
    assert ran, page


def check_output(block: Block, said: str) -> None:
    assert alike(said, block.text), f"{block.place} is not what the block before it prints:\n{said}"


def run(block: Block, names: dict[str, Any], server: Any, loop: asyncio.AbstractEventLoop, may_fail: bool) -> str:
    """Run a block; returns what it prints."""
    text = block.text if server is None else block.text.replace(HERE, server.url).replace("MODEL", server.model)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if block.language == "python":
            place = "\n" * (block.line - 1) + text
            code = compile(place, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            waiting = FunctionType(code, names)()
            if inspect.iscoroutine(waiting):
                loop.run_until_complete(waiting)
        else:
            for words in filter(is_run, commands(text)):
                _, words = split_environment(words)
                print(curl(words[1:], server, may_fail) if words[0] == "curl" else command(words[1:]))
    return "".join(line for line in out.getvalue().splitlines(keepends=True) if not LOGGED.match(line))


def command(words: list[str]) -> str:
    """What a subcommand of `weir` prints."""
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def curl(words: list[str], server: Any, may_fail: bool) -> str:
    """The answer that curl would print."""
    method, headers, data, url = "", {}, None, ""
    waiting = iter(words)
    for word in waiting:
        if word == "-X":
            method = next(waiting)
        elif word == "-H":
            name, _, value = next(waiting).partition(":")
            headers[name.strip()] = value.strip()
        elif word in ("-d", "--data", "--data-binary"):
            value = next(waiting)
            data = Path(value[1:]).read_bytes() if value.startswith("@") else value.encode()
        elif word in ("-s", "-N"):
            pass
        else:
            assert not word.startswith("-"), f"curl {word}"
            url = word
    url = url.removeprefix(HERE).removeprefix("localhost:8000")
    url = url.removeprefix(server.url)
    answer = httpx.request(
        method or ("POST" if data else "GET"), server.url + url, headers=headers, content=data, timeout=120
    )
    assert may_fail or answer.status_code < 400, answer.text
    return answer.text


def alike(said: str, shown: str) -> bool:
    """Whether it was printed: white space aside, "..." for anything, numbers to two per cent."""
    pattern = "".join(
        ".*?" if part == "..." else f"({NUMBER})" if re.fullmatch(NUMBER, part) else re.escape(part)
        for part in re.split(rf"(\.\.\.|(?<![\w.]){NUMBER})", " ".join(shown.split()))
        if part is not None
    )
    found = re.fullmatch(pattern, " ".join(said.split()))
    if found is None:
        return False
    numbers = re.findall(rf"(?<![\w.]){NUMBER}", " ".join(shown.replace("...", " ").split()))
    return all(close(a, b) for a, b in zip(found.groups(), numbers, strict=True))


def close(said: str, shown: str) -> bool:
    if re.fullmatch(r"[-+]?[\d,]+", shown):
        return said == shown
    a, b = (float(one.replace(",", "")) for one in (said, shown))
    return abs(a - b) <= 0.02 * max(abs(a), abs(b), 0.5)


SERVE = [
    pytest.param(words, id=block.place)
    for page in pages()
    for block in blocks(page)
    if block.language == "bash"
    for words in (split_environment(words)[1] for words in commands(block.text))
    if words[:2] in (["weir", "serve"], ["vllm", "serve"])
]


@pytest.mark.parametrize("words", SERVE)
def test_a_server_takes_these_options(words: list[str]) -> None:
    options = prepare(words[2:], {}) if words[0] == "weir" else words[2:]
    assert serve_parser().parse_args(["serve", *options]).subparser == "serve"
