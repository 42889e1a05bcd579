"""Words that a shell may offer for an argument or an option's value; see neffcache.flows.completing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def offer(kind: str) -> Complete:
    """The `shell_complete` of click for a kind of word."""

    def complete(context: click.Context, _: click.Parameter, begun: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from neffcache.flows.completing import candidates

        logging.disable(logging.CRITICAL)  # a warning would stand in the middle of the line that somebody types
        found = candidates(kind, begun, context.params.get("directory"), os.environ)
        return [CompletionItem(word, help=about or None) for word, about in found]

    return complete
