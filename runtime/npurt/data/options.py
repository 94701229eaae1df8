"""What can be chosen about the data, and what is counted on the way."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from npurt.errors import UsageError

TemplateUse = Literal["auto", "chat", "plain"]
LossOn = Literal["response", "all"]
Overlong = Literal["cut", "drop", "error"]


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How rows become sequences. None of it needs another bundle.

    template -- how `{"prompt", "response"}` rows are rendered: as a user and an assistant turn of the model's chat
        template (`chat`), as prompt, response and end-of-sequence token (`plain`), or `auto`: as a chat if the model
        has a template.
    loss_on -- `response`: what the assistant says, with its end-of-turn tokens; `all`: every token. Of `{"text"}` rows
        every token is supervised either way.
    overlong -- what happens to rows longer than the sequence: see `npurt.data.fitting`.
    pack -- several rows in one sequence, unseen by each other; otherwise one row each, padded.
    shuffle, seed -- the order of packs: of epoch e it is a function of (seed, e) alone. Without shuffling, file order.
    clock -- the time that chat templates see in `strftime_now`; None is the time of loading.
    """

    template: TemplateUse = "auto"
    loss_on: LossOn = "response"
    overlong: Overlong = "cut"
    pack: bool = True
    shuffle: bool = True
    seed: int = 0
    clock: dt.datetime | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` for a value that is none of those offered."""
        for name, value, offered in (
            ("template", self.template, get_args(TemplateUse)),
            ("loss_on", self.loss_on, get_args(LossOn)),
            ("overlong", self.overlong, get_args(Overlong)),
        ):
            if value not in offered:
                raise UsageError(f"{name} is one of {', '.join(offered)}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows.

    rows, blank_lines -- read from the files.
    documents -- runs of tokens that see only themselves: one for a row, several for a text that was split.
    packs, capacity -- sequences per epoch, and the tokens they have room for.
    tokens, supervised_tokens -- in all packs, without padding; those that are predicted and count in the loss.
    rows_cut, rows_split, rows_dropped -- rows longer than the sequence, shortened or split into several documents; rows
        left out, since nothing supervised remained or the options say so.
    ends_lost -- rows cut within their only assistant turn, whose end-of-turn token went with the rest.
    turns_without_end -- assistant turns that the chat template closes with no special token: the model learns no end
        there.
    """

    rows: int
    blank_lines: int
    documents: int
    packs: int
    capacity: int
    tokens: int
    supervised_tokens: int
    rows_cut: int
    rows_split: int
    rows_dropped: int
    ends_lost: int
    turns_without_end: int

    def __str__(self) -> str:
        """One line for a person."""
        parts = [
            _number(self.rows, "row"),
            _number(self.documents, "document"),
            f"{_number(self.packs, 'pack')} ({_percent(self.tokens, self.capacity)} full)",
            _number(self.tokens, "token"),
            f"{self.supervised_tokens:,} supervised ({_percent(self.supervised_tokens, self.tokens)})",
            f"{_number(self.rows_cut, 'row')} cut",
            f"{self.rows_split:,} split",
            f"{self.rows_dropped:,} dropped",
        ]
        for count, what in (
            (self.ends_lost, "cut before the end-of-turn token"),
            (self.turns_without_end, "assistant turns without an end-of-turn token"),
            (self.blank_lines, "blank lines passed over"),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, int]:
        """The same, for JSON."""
        return asdict(self)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
