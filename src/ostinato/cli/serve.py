"""An OpenAI-compatible server with a page at /. SIGTERM or Ctrl-C lets open requests end first; a second one stops."""

from __future__ import annotations

import argparse
import importlib.util
import logging

from ostinato.cli import variables
from ostinato.cli.options import add_engine_options, byte_size, engine_options
from ostinato.cli.session import open_llm
from ostinato.config import EngineConfig
from ostinato.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
NEEDED = ("fastapi", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client")
MAX_QUEUE, MAX_BODY = 1024, "16MiB"
TOOL_CALL_PARSERS = ("hermes", "llama3_json")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ostinato serve [OPTIONS] MODEL"
    group = parser.add_argument_group("server options")
    group.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen on [127.0.0.1]")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one [8000]")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="what clients must send; may be given several times [$OSTINATO_API_KEY, or none needed]",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; may be given several times [MODEL]",
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=MAX_QUEUE,
        metavar="N",
        help=f"requests that may wait beyond those that run; more are answered 429 [{MAX_QUEUE}]",
    )
    group.add_argument("--max-body", default=MAX_BODY, metavar="SIZE", help=f"largest body of a request [{MAX_BODY}]")
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="let the model decide whether to call a tool; needs --tool-call-parser",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        help="how the model writes calls: hermes (Hermes, Qwen) or llama3_json (Llama 3.1 and later)",
    )
    group.add_argument(
        "--enable-sleep-mode",
        action="store_true",
        help="POST /sleep and /wake_up: give the memory of weights and KV cache back for a while, and take it again",
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="debug logs every request [info]")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install 'ostinato[server]'")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port {args.port}: must be between 0 and 65535")
    if args.max_queue < 0:
        raise ConfigError(f"--max-queue {args.max_queue}: must be at least 0")
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        raise ConfigError(f"--enable-auto-tool-choice needs --tool-call-parser {' or '.join(TOOL_CALL_PARSERS)}")
    max_body_bytes = byte_size(args.max_body)
    options = engine_options(args)
    EngineConfig.from_options(args.model, options)  # a wrong option is told before anything listens

    from ostinato.engine.async_engine import AsyncEngine
    from ostinato.server.run import ServerConfig, run_server

    level = min(getattr(logging, args.log_level.upper()), logging.INFO if args.verbose else logging.ERROR)
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", force=True)
    key = variables.api_key()
    engine = AsyncEngine(lambda: open_llm(args.model, **options), max_queue=args.max_queue)
    config = ServerConfig(
        host=args.host,
        port=args.port,
        model_names=args.served_model_name or [args.model],
        api_keys=args.api_key or ([] if key is None else [key]),
        max_body_bytes=max_body_bytes,
        log_level=args.log_level,
        tool_call_parser=args.tool_call_parser if args.enable_auto_tool_choice else None,
        enable_sleep_mode=args.enable_sleep_mode,
    )
    return run_server(engine, config)
