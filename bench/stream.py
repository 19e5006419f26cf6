"""How fast rows reach a trainer: by shared memory, by TCP on one machine, and by files of safetensors.

PYTHONPATH=src python bench/stream.py --out bench/results/stream_cpu.json

One process makes batches of bfloat16 rows from tensors that are there, another reads each and sums a byte of every
page, so that memory is really read. Files are written and read on the same disk (the page cache holds them); the reader
gets a file's name when it is written, and deletes it. GB/s from the first batch to the last, and CPU seconds of both
processes for a GB, which other load on the machine changes less; medians of the repetitions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_weir.streaming.batches import BatchLayout, Cursor
from vllm_weir.streaming.dataset import StreamedRows
from vllm_weir.streaming.sender import RowSender


def made(rows: int, width: int) -> dict[str, torch.Tensor]:
    labels = {name: torch.arange(rows) for name in ("positions", "token_ids", "requests")}
    return {"resid_post.0": torch.randn(rows, width).bfloat16(), **labels}


def touch(tensor: torch.Tensor) -> int:
    return int(tensor.view(torch.uint8).flatten()[::4096].sum())


def read_stream(address: str, token: str, done: Any) -> None:
    torch.set_num_threads(1)
    count, begun = 0, time.process_time()
    for batch in StreamedRows(address, token):
        touch(batch.rows["resid_post", 0])
        count += 1
    done.put((count, time.process_time() - begun))


def read_files(names: Any, done: Any) -> None:
    torch.set_num_threads(1)
    count, begun = 0, time.process_time()
    while (name := names.get()) is not None:
        touch(load_file(name)["resid_post.0"])
        os.unlink(name)
        count += 1
    done.put((count, time.process_time() - begun))


def elapsed(done: Any, batches: int, begun: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds since it was begun, and the CPU seconds of both processes, once the reader has all batches."""
    count, reader = done.get()
    assert count == batches + 1
    return time.perf_counter() - begun[0], time.process_time() - begun[1] + reader


def by_stream(address: str | None, batches: int, tensors: dict[str, torch.Tensor], ahead: int) -> tuple[float, float]:
    context, rows = multiprocessing.get_context("spawn"), len(tensors["positions"])
    sender, done = RowSender(address, None, ahead, Cursor()), context.Queue()
    layout = BatchLayout(tensors, rows)
    process = context.Process(target=read_stream, args=(sender.address, sender.token, done))
    process.start()
    torch.set_num_threads(1)
    begun = 0.0, 0.0
    for number in range(-1, batches):  # one batch before, which waits for the process to start
        sender.wait_for_room()
        views, offset = sender.reserve(layout, rows)
        for name, view in views.items():
            view.copy_(tensors[name])
        sender.publish(layout, offset, rows, Cursor(number + 2))
        if number < 0:
            while not sender.clients:
                time.sleep(0.001)
            begun = time.perf_counter(), time.process_time()
    sender.finish()
    seconds = elapsed(done, batches, begun)
    process.join()
    sender.close()
    return seconds


def by_files(batches: int, tensors: dict[str, torch.Tensor]) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    names, done = context.Queue(4), context.Queue()
    process = context.Process(target=read_files, args=(names, done))
    process.start()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        save_file(tensors, f"{folder}/first")
        names.put(f"{folder}/first")
        while os.path.exists(f"{folder}/first"):
            time.sleep(0.001)
        begun = time.perf_counter(), time.process_time()
        for number in range(batches):
            save_file(tensors, f"{folder}/{number}")
            names.put(f"{folder}/{number}")
        names.put(None)
        seconds = elapsed(done, batches, begun)
    process.join()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=1024, help="of a batch")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    tensors = made(options.rows, options.width)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    ways = {
        "shared memory": lambda: by_stream(None, options.batches, tensors, 64 << 20),
        "TCP, one machine": lambda: by_stream("tcp://127.0.0.1:0", options.batches, tensors, 64 << 20),
        "files of safetensors": lambda: by_files(options.batches, tensors),
    }
    result: dict[str, Any] = {
        "processor": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "batch": f"{options.rows} rows of {options.width}, bfloat16", "batches": options.batches,
    }  # fmt: skip
    for name, run in ways.items():
        size = options.batches * nbytes / 1e9
        seconds, busy = zip(*(run() for _ in range(options.repeat)), strict=True)
        result[name] = {
            "GB/s": round(size / statistics.median(seconds), 2),
            "CPU s/GB": round(statistics.median(busy) / size, 2),
            "all GB/s": [round(size / one, 2) for one in seconds],
        }
        print(name, result[name])
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
