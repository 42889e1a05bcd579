"""The `neffcache` command: lazy verbs, one place that prints errors, one place that turns signals into exit codes."""

from __future__ import annotations

import atexit
import gc
import importlib
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from neffcache import __version__
from neffcache.errors import Bug, CompileFailed, NeffcacheError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

VERBS = {
    "configs": "Every known configuration with its verdict.",
    "key": "The job key of a configuration and its five components.",
    "plan": "What a warm would trace and compile; compiles nothing.",
    "warm": "Trace, compile what is missing, write manifests.",
    "compile": "Single IR files to NEFFs, with neuronx-cc.",
    "check": "HIT, PARTIAL, MISS or UNKNOWN.",
    "explain": "Why a configuration is not a HIT.",
    "init": "For init containers: fetch a job's files and make its view.",
    "run": "Train from the warm cache, and prove it.",
    "env": "The exact environment that run would set.",
    "pull": "Bring what a job needs from the remote.",
    "push": "Send what a job needs to the remote.",
    "ls": "What the store holds.",
    "show": "One manifest, graph record or ref.",
    "verify": "Hash everything in the store again.",
    "doctor": "Toolchain, device, stores, settings: what is here and what is wrong.",
    "sign": "Sign what a store says about a configuration.",
    "keygen": "Make a key pair to sign with.",
    "export": "Write configurations into one file.",
    "import": "Read such a file into the store.",
    "completion": "Let bash, zsh or fish complete all this.",
}
"""Verb -> help line; each lives in the module of its name."""


class Interrupted(BaseException):
    """A signal that ends the command; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Verbs(click.Group):
    """Imports a verb's module only when that verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        # `import` is a word of Python: its module is import_.
        module = importlib.import_module(f"neffcache.cli.{cmd_name}{'_' if cmd_name == 'import' else ''}")
        command: click.Command = module.command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(verb, help=about) for verb, about in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example:  neffcache warm llama3_8b --lnc 2",
)
@click.version_option(__version__, prog_name="neffcache")
def neffcache() -> None:
    """A compile cache and ahead-of-time build tool for PyTorch training on AWS Trainium."""


def _raise(number: int, _: FrameType | None) -> NoReturn:
    raise Interrupted(number)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with a code of the contract."""
    # A command makes few cycles, most of which it needs to its end; looking for them is a fifth of a short one.
    gc.set_threshold(200_000, 50, 50)
    atexit.register(gc.freeze)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _raise)
    words = sys.argv[1:] if arguments is None else arguments
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    own = words[: words.index("--")] if "--" in words else words
    as_json = "--json" in own
    try:
        result = neffcache.main(args=words, prog_name="neffcache", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except NeffcacheError as fault:
        _say(fault, as_json)
        return fault.exit_code
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as fault:
        if as_json:
            _print_json({"error": "Usage", "message": fault.format_message(), "hint": "", "exit_code": 2})
        fault.show(sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; what was finished is kept", err=True)
        return 130
    except Interrupted as stopped:
        click.echo("terminated; what was finished is kept", err=True)
        return 130 if stopped.number == signal.SIGINT else 143
    except BrokenPipeError:
        return 1


def _say(fault: NeffcacheError, as_json: bool) -> None:
    if as_json:
        _print_json(fault.to_json())
    click.echo(f"error: {fault.message}", err=True)
    if fault.hint:
        click.echo(f"hint: {fault.hint}", err=True)
    if isinstance(fault, Bug | CompileFailed) and fault.details.get("log") and not fault.details.get("log_file"):
        click.echo(str(fault.details["log"])[-3000:], err=True)


def _print_json(document: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(document))


if __name__ == "__main__":
    main()
