"""The measuring process: starts the systems, takes turns, keeps to the limits, and never loses a case silently."""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_weir.bench.deadlines import Deadlines, TaskTimes
from vllm_weir.bench.plan import CAPTURES, CASES, STEERS, BenchPlan, BenchTask
from vllm_weir.bench.process import WorkerExited, WorkerProcess, WorkerTimeout
from vllm_weir.bench.result import UNCOMPARED, BenchResult, RowCheck, mark_checks, set_ratios, startup

RESTARTS = 4


class Bench:
    """One run of the plan."""

    def __init__(self, plan: BenchPlan, out: Path, workdir: Path, say: Callable[[str], None]) -> None:
        self.plan = plan
        self.out = out
        self.workdir = workdir
        self.say = say
        self.clients: dict[str, WorkerProcess] = {}
        self.restarts: dict[str, int] = {}
        self.starts: dict[str, list[float]] = {}
        self.refused: dict[str, str] = {}
        self.tallies: list[TaskTimes] = []
        self.samples: list[tuple[str, Path]] = []
        self.steered: dict[tuple[str, str], dict[str, Any]] = {}
        self.compared: list[RowCheck] = []
        self.limits = Deadlines.of(plan)
        settings = plan.model_dump(mode="json", exclude={"model", "lens_path"})
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.result = BenchResult(device="", vllm="", torch="", model=plan.model_name, runs=[{"date": now, **settings}])

    def run(self) -> BenchResult:
        """All groups one after the other; the result is on the disk after each."""
        started = time.monotonic()
        self.limits = Deadlines.of(self.plan)
        try:
            for group in self.groups():
                self.run_group(group)
        finally:
            for client in self.clients.values():
                client.close()
        if self.samples:
            self.say("comparing the rows with transformers")
            from vllm_weir.bench.reference import compare

            self.compared = compare(self.plan, self.samples, self.workdir)
        self.result.runs[0]["seconds"] = round(time.monotonic() - started, 1)
        self.write()
        return self.result

    def groups(self) -> list[list[str]]:
        """Systems whose engines live at the same time."""
        names = list(self.plan.systems)
        pair = [n for n in names if n in ("stock", "weir")]
        if not self.plan.interleave or len(pair) < 2:
            return [[n] for n in names]
        return [pair, *([n] for n in names if n not in pair)]

    def run_group(self, names: Sequence[str]) -> None:
        """Start, take turns, check, stop."""
        for i in range(self.plan.startups):
            for name in names:
                if name not in self.refused:
                    self.open(name, timed=True)
            if i < self.plan.startups - 1:
                self.stop(names)
        tallies = [TaskTimes(t) for n in names if n in self.clients for t in self.plan.tasks(n)]
        self.tallies += tallies
        for kind in sorted({(t.task.system, t.task.case) for t in tallies if t.task.case in STEERS}):
            self.check_steering(*kind)  # first: what is timed later may end the engine
        if len(names) > 1:
            for size in self.plan.sizes():
                self.take_turns([t for t in tallies if t.task.size == size])
        else:
            for tally in tallies:
                self.take_turns([tally])
        self.stop(names)
        self.write()

    def open(self, name: str, timed: bool) -> bool:
        """Start a system's engine; False, with the reason in the result, if it cannot."""
        if self.limits.of_run() <= 0:
            self.refuse(name, "skipped", f"not started: the limit is {self.plan.run_seconds:.0f} s a run")
            return False
        self.say(f"{name}: starting")
        client = self.clients[name] = WorkerProcess(name, self.plan, self.workdir)
        try:
            hello = client.ask(120, "hello")
            if hello.get("missing"):
                self.refuse(name, "skipped", hello["missing"])
                return False
            ready = client.ask(self.plan.start_seconds, "start")
            for reply in (hello, ready, client.ask(120, "fill") if "error" not in ready else {}):
                if "error" in reply:
                    self.refuse(name, "failed", f"{reply['error']} | {client.last_words()}")
                    return False
        except (WorkerTimeout, WorkerExited) as e:
            self.refuse(name, "failed", f"did not start: {e}")
            return False
        if timed:
            self.starts.setdefault(name, []).append(ready["seconds"])
        about = ready["about"]
        self.result.device, self.result.vllm, self.result.torch = about["device"], about["vllm"], about["torch"]
        arguments = {k: v for k, v in ready["arguments"].items() if k != "model"}
        self.result.systems[name] = {"status": "measured", "version": hello["version"], "engine": arguments}
        self.say(f"{name}: ready after {ready['seconds']:.1f} s")
        return True

    def refuse(self, name: str, status: str, reason: str) -> None:
        """A system that cannot be measured is in the result, with the reason."""
        self.say(f"{name}: {status}: {reason}")
        self.refused[name] = reason
        self.result.systems[name] = {"status": status, "reason": reason}
        if name in self.clients:
            self.clients.pop(name).close(5)

    def stop(self, names: Sequence[str]) -> None:
        """End the engines of a group."""
        for name in names:
            if name in self.clients:
                self.clients.pop(name).close()

    def take_turns(self, tallies: Sequence[TaskTimes]) -> None:
        """Warm-ups of each, then one repeat of each after the other, so that a drift meets all alike."""
        for tally in tallies:
            self.skip_if_hopeless(tally)
            for _ in range(self.plan.warmups):
                self.once(tally, tally.warm)
        for _ in range(self.plan.repeats):
            for tally in tallies:
                self.once(tally, tally.timed)
        for tally in tallies:
            shown = tally.result()
            figure = "-" if shown.median is None else f"{shown.median:.2f}"
            unit = "ms" if tally.task.size.kind == "decode" else "ktok/s"
            note = f" ({shown.note})" if shown.note else ""
            self.say(f"{tally.task.system}: {tally.task.case}, {tally.task.size.label}: {figure} {unit}{note}")
        self.write()

    def skip_if_hopeless(self, tally: TaskTimes) -> None:
        """A batch is not tried after a smaller one of the same case ran out of time."""
        task = tally.task
        for other in self.tallies:
            o = other.task
            same = (o.system, o.case, o.size.kind) == (task.system, task.case, task.size.kind)
            if same and other.late and not other.timed and o.size.count < task.size.count:
                tally.close(f"not tried: {o.size.label} {other.note}", late=True)
                return

    def once(self, tally: TaskTimes, into: list[float]) -> None:
        """One run, unless it would not fit."""
        if tally.closed:
            return
        runs = tally.warm + tally.timed
        left = self.limits.left(tally)
        if left <= min(runs, default=0):
            one = f"one run took {runs[-1]:.1f} s" if runs else "not begun"
            self.limits.end(tally, f"stopped after {len(tally.timed)} repeats" if tally.timed else one)
            return
        task = tally.task
        client = self.clients.get(task.system) or self.again(task.system)
        if client is None:
            tally.close("not run: its engine ended before and did not come back")
            return
        left = self.limits.left(tally)  # a new engine took its time
        keep = None
        if task.case in CAPTURES and into is tally.timed and not into:
            keep = str(self.workdir / f"rows-{len(self.samples)}.safetensors")
        try:
            reply = client.ask(left, "run", case=task.case, size=task.size.model_dump(), keep=keep)
        except WorkerTimeout:
            tally.lost = left
            logged = client.last_error()
            self.drop(task.system)
            self.limits.end(tally, "did not finish", f"; logged: {logged}" if logged else "")
        except WorkerExited as e:
            self.drop(task.system)
            tally.close(f"failed: {e}")
        else:
            if "error" in reply:
                tally.close(f"failed: {reply['error']}")
            else:
                into.append(reply["seconds"])
                if into is tally.timed:
                    tally.graphs += reply.get("graphs", 0)
                if keep:
                    self.samples.append((task.system, Path(keep)))

    def drop(self, name: str) -> None:
        """End a system's process at once."""
        self.clients.pop(name).close(0.1)

    def again(self, name: str) -> WorkerProcess | None:
        """A new engine for a system whose last one ended, if there is time for its start."""
        if self.starts.get(name, [0])[-1] > self.limits.of_run():
            return None
        self.restarts[name] = self.restarts.get(name, 0) + 1
        if self.restarts[name] > RESTARTS or name in self.refused:
            return None
        about = self.result.systems.get(name)
        if self.open(name, timed=False):
            return self.clients[name]
        if about is not None:
            self.result.systems[name] = about  # what it measured before stands
        return None

    def check_steering(self, name: str, case: str) -> None:
        """Rows after a kind of steering against the rows before it plus the vector."""
        client = self.clients.get(name) or self.again(name)
        left = min(self.plan.case_seconds, self.limits.of_run())
        if client is None or left <= 0:
            return
        try:
            self.steered[name, case] = client.ask(left, "steer_check", case=case)
        except (WorkerTimeout, WorkerExited) as e:
            self.say(f"{name}: {case} was not compared: {e}")
            self.drop(name)

    def write(self) -> None:
        """The result so far."""
        cases = [t.result() for t in self.tallies]
        if "startup" in self.plan.cases:
            cases += [startup(name, seconds) for name, seconds in self.starts.items()]
        self.result.cases = sorted(cases, key=lambda c: (CASES.index(c.case), c.label != "start"))
        self.result.checks = [
            steering_check(t.task, reply, self.plan.dtype)
            for t in self.tallies
            if t.timed and (reply := self.steered.get((t.task.system, t.task.case)))
        ] + self.compared
        unchecked(self.result)
        set_ratios(self.result.cases)
        mark_checks(self.result)
        self.result.save(self.out)


def steering_check(task: BenchTask, reply: dict[str, Any], dtype: str) -> RowCheck:
    """A worker's answer as a check of one task."""
    what = reply.get("error") or f"after = before + vector, {reply['rows']} rows of {reply['layers']} blocks"
    value = min(reply.get("worst", 1e9), 1e9)
    # One rounding of the sum; two passes differ by what all blocks before have rounded.
    # Two bfloat16 passes of a deep model differ by several percent: what is not steered at all differs by more.
    bound = 1e-5 if dtype == "float32" else 2**-7 if reply.get("one_pass") else 2**-3
    return RowCheck(
        system=task.system,
        case=task.case,
        size=task.size.label,
        what=what,
        value=value if value == value else 1e9,
        bound=bound,
        rows=reply.get("rows", 0),
        passed=value <= bound and reply["cosine"] > 0.9,
        detail={k: reply[k] for k in ("cosine",) if k in reply},
    )


def unchecked(result: BenchResult) -> None:
    """A case whose rows should have been compared, and were not, says so."""
    compared = {(c.system, c.case, c.size) for c in result.checks}
    for case in result.cases:
        owed = case.case in (*CAPTURES, *STEERS) and case.median is not None
        if owed and (case.system, case.case, case.label) not in compared:
            case.note = "; ".join(filter(None, [case.note, UNCOMPARED]))


def in_directory(plan: BenchPlan, out: Path, workdir: Path, say: Callable[[str], None]) -> BenchResult:
    """Run the plan; the processes' logs stay beside the result if something went wrong."""
    bench = Bench(plan, out, workdir, say)
    try:
        return bench.run()
    finally:
        logs = out.with_suffix(".logs")
        wrong = not bench.result.passed or any(s["status"] == "failed" for s in bench.result.systems.values())
        if wrong or any(c.note for c in bench.result.cases):
            logs.mkdir(parents=True, exist_ok=True)
            for log in workdir.glob("*/log.txt"):
                shutil.copy(log, logs / f"{log.parent.name}.txt")
