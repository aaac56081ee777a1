"""Every set of an attention's options: a tile may spill registers only where two options meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

WIDTHS = (64, 128)  # head dimensions of the presets


def combinations(positions: dict[str, dict], options: dict[str, dict]) -> Iterator[tuple[str, dict]]:
    """Yield (name, keywords of a call) for each width, form of the positions and set of options."""
    sets = [names for number in range(len(options) + 1) for names in itertools.combinations(options, number)]
    for d, form, names in itertools.product(WIDTHS, positions, sets):
        keywords = {name: value for each in names for name, value in options[each].items()}
        yield ", ".join((f"d{d} {form}", *names)), {"D": d, **positions[form], **keywords}
