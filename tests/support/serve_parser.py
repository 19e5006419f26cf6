"""vLLM's own parser of the options of its server."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def serve_parser() -> Any:
    """Return the parser of `vllm serve`; to make it takes seconds."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    return parser
