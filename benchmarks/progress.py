"""How far is the benchmark? A bar on stderr where somebody watches it."""

from __future__ import annotations

import sys
from types import TracebackType

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Progress:
    """Counts cases, in fractions: a bar with tqdm, else a line for each; silent off a terminal."""

    def __init__(self, cases: int, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self._bar = None
        if self._shown and tqdm is not None:
            layout = "{desc:<24} {percentage:3.0f}% |{bar:40}| {elapsed} < {remaining}"
            self._bar = tqdm(total=cases, bar_format=layout, file=sys.stderr, leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def start_case(self, title: str) -> None:
        if self._bar is not None:
            self._bar.set_description_str(title)
        elif self._shown:
            print(f"{title} ...", file=sys.stderr, flush=True)

    def advance(self, cases: float) -> None:
        if self._bar is not None:
            self._bar.update(cases)
