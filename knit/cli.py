"""The command ``knit``. Errors of the user are one readable line; nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from knit.errors import ConfigError, KnitError
from knit.replay import options as replay_options

TRAIN_HELP = """\
Settings are overrides in Hydra's grammar:

  knit train recipe=quickstart
  knit train recipe=path/to/my.yaml steps=200 optim.lr=1e-6
  knit train recipe=quickstart sources.gcd.ratio=0.5 'admission.schedule=[0,0,0.5,1]'

Sources are addressed by name. --cfg job prints every setting with its value; knit/config/schema.py documents them.
Exit codes: 0 done, 1 the run failed, 2 the input is wrong, 130 interrupted.
"""


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments as all other wrong input is reported."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; never raises but for ``--help``."""
    previous = signal.signal(signal.SIGTERM, _end)
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        args.command(args)
        return 0
    except KnitError as error:
        _say(str(error), every_line=isinstance(error, ConfigError))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except Exception as error:  # a bug: the traceback is for whoever mends it
        _say(f"unexpected {type(error).__name__}: {error} ({_where_traceback_is(error)})")
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="knit", description="Reinforcement learning for large language models on a cluster.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train", help="train a policy", epilog=TRAIN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings; recipe=NAME or recipe=FILE first")
    train.add_argument("--cfg", choices=["job"], help="print the resolved settings as YAML and end")
    train.add_argument("--json", type=Path, metavar="FILE", help="also write the summary to FILE")
    train.set_defaults(command=run_train)
    replay = commands.add_parser(
        "replay",
        help=replay_options.HELP,
        epilog=replay_options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay_options.add_arguments(replay)
    replay.set_defaults(command=run_replay)
    bench = commands.add_parser("bench", help="what the parts of knit cost on this machine")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    admission = benches.add_parser("admission", help="seconds of an admission decision and of a completion")
    admission.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    admission.set_defaults(command=run_bench_admission)
    args, rest = parser.parse_known_args(argv)
    wrong = [word for word in rest if word.startswith("-") or args.command is not run_train]
    if wrong:
        parser.error(f"unknown argument {wrong[0]}")
    if rest:
        args.overrides += rest  # overrides after an option
    return args


def run_replay(args: argparse.Namespace) -> None:
    from knit.replay import command

    _check_json(args.json)
    results = command.run(args)
    if args.json is not None:
        _write_json(args.json, results)


def run_bench_admission(args: argparse.Namespace) -> None:
    from knit.buffer import bench

    _check_json(args.json)
    results = bench.run()
    if args.json is not None:
        _write_json(args.json, results)


def run_train(args: argparse.Namespace) -> None:
    """``knit train``: everything that can be wrong is checked before anything is started."""
    from knit.config.load import load, to_yaml
    from knit.config.resolved import resolve
    from knit.config.validate import check

    conf = load(args.overrides)
    if args.cfg:
        print(to_yaml(conf), end="")
        return
    _check_json(args.json)
    resolved = resolve(conf)
    check(conf, resolved)
    _check_sources(conf)
    summary = _run(conf, resolved)
    if args.json is not None:
        _write_json(args.json, summary)


def _check_json(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {path.absolute().parent}")


def _check_sources(conf: Any) -> None:
    from knit import preflight

    preflight.check(conf)


def _run(conf: Any, resolved: Any) -> dict[str, Any]:
    from knit.config.validate import check
    from knit.prepare import prepare
    from knit.track.run_dir import create_run_dir, logged_to, write_config
    from knit.track.tracker import Tracker

    create_run_dir(conf, resolved)
    with logged_to(resolved.logs_dir / "driver.log"), Tracker(conf, resolved) as tracker:
        prepared = prepare(conf, resolved.logs_dir, tracker.note)
        if prepared is not conf:
            check(prepared, resolved)
            write_config(prepared, resolved)
        from knit import driver  # imports Ray

        return tracker.summary(driver.run(prepared, resolved, tracker))


def _write_json(path: Path, summary: dict[str, Any]) -> None:
    import orjson

    path.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))


def _say(message: str, every_line: bool = False) -> None:
    """On stderr; of a longer message, such as the end of a log, only the first line is marked."""
    lines = message.splitlines() or [""]
    for number, line in enumerate(lines):
        print(f"knit: error: {line}" if number == 0 or every_line else line, file=sys.stderr, flush=True)


def _where_traceback_is(error: Exception) -> str:
    """In the log of the run; when there is none yet, it is written to a file of its own."""
    notes = getattr(error, "__notes__", [])
    if notes:
        return str(notes[-1])
    with tempfile.NamedTemporaryFile("w", prefix="knit-crash-", suffix=".log", delete=False) as file:
        file.write(traceback.format_exc())
    return f"traceback: {file.name}"


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends like an error: whatever was started is ended on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
