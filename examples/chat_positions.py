"""Positions in a chat: the turns of a conversation by position, the assistant's tokens alone, and no special tokens.

python examples/chat_positions.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

import vllm_weir as weir

LAYER = 3
CHAT = [
    {"role": "user", "content": "Tell me a story about Tom."},
    {"role": "assistant", "content": "Tom went to the garden. Tom was happy."},
    {"role": "user", "content": "Was Anna happy?"},
]


def turns(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[range]]:
    """The prompt's token ids, and the positions of each message and of what the template writes after the last one."""

    def ids(some: Sequence[dict[str, str]], **more: Any) -> list[int]:
        text = tokenizer.apply_chat_template(some, tokenize=False, **more)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    whole = ids(messages, add_generation_prompt=True)
    found, start = [], 0
    for k in range(1, len(messages) + 1):
        part = ids(messages[:k])
        if whole[: len(part)] != part:
            raise ValueError("this template writes a message in another way once more follow")
        found.append(range(start, len(part)))
        start = len(part)
    return whole, [*found, range(start, len(whole))]


def main() -> None:
    model = weir.demo_model()
    llm = LLM(model, dtype="float32", max_model_len=256, kv_cache_memory_bytes=256 << 20, enforce_eager=True)
    tokenizer = llm.get_tokenizer()
    prompt, (first, answer, last, opening) = turns(tokenizer, CHAT)
    print(f"{len(prompt)} tokens: user {first}, assistant {answer}, user {last}, then {opening}")

    def ask(params: SamplingParams) -> Any:
        (out,) = llm.chat(CHAT, params, use_tqdm=False)
        assert list(out.prompt_token_ids) == prompt
        return out

    plain = SamplingParams(max_tokens=32, temperature=0)

    # One row for each turn: the mean over its positions. Ranges and lists of positions are selectors.
    captures = [
        weir.Capture("resid_post", layers=LAYER, positions=last, reduce="mean"),
        weir.Capture("resid_mid", layers=LAYER, positions=[*first, *last], reduce="mean"),
    ]
    acts = ask(weir.params(plain, capture=captures)).activations
    print(f"last user turn {list(acts['resid_post', LAYER].shape)}, both {list(acts['resid_mid', LAYER].shape)}")

    # The rows at the tokens that begin the users' turns.
    marker = tokenizer.convert_tokens_to_ids("<|user|>")
    at = ask(weir.params(plain, capture=weir.Capture(layers=LAYER, positions={"token_ids": [marker]})))
    print(f"users' turns begin at {at.activations.positions.tolist()}")

    # Every token but the special ones, of the prompt and of what is generated: no row of <bos>, <|user|>, ...
    words = ask(weir.params(plain, capture=weir.Capture(layers=LAYER, positions={"special": False})))
    kept, rows = words.activations, len(prompt) + len(words.outputs[0].token_ids) - 1
    special = set(tokenizer.all_special_ids) & set(kept.token_ids.tolist())
    print(f"without special tokens {len(kept.positions)} of {rows} rows; special tokens among them: {len(special)}")

    mean = weir.Capture(layers=LAYER, positions="-2:", reduce="mean")
    read = weir.params(SamplingParams(max_tokens=1), capture=mean)
    moods = ["Tom went to the garden. Tom was happy.", "Tom went to the garden. Tom was sad."]
    happy, sad = (out.activations["resid_post", LAYER][0] for out in llm.generate(moods, read, use_tqdm=False))
    # "sampled": the rows that the assistant's tokens are sampled from, and nothing of what it reads.
    for scale, where in ((-2.0, "sampled"), (2.0, "sampled"), (-2.0, {"special": False}), (-2.0, answer)):
        out = ask(weir.params(plain, interventions=weir.Add(happy - sad, LAYER, scale=scale, positions=where)))
        changed = sum(out.receipt.steered[0].values())
        print(f"{scale:+g} at {where}, {changed} rows: ...{out.outputs[0].text[-70:]}")


# vLLM starts processes that import this module again.
if __name__ == "__main__":
    main()
