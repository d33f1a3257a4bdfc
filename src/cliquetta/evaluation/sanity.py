"""Signs that a number is wrong rather than bad."""

from __future__ import annotations

from cliquetta.errors import UserError

FEW_IMAGES = 30
"""Below this many images chance itself swings too far to say anything."""


def near_chance(accuracy: float, *, classes: int, images: int) -> str | None:
    """A warning if a zero-shot accuracy (0 to 1) is so low that labels look shuffled.

    The line is five times chance; for short class lists, where that would be more than CLIP
    reaches on hard data, a quarter of the way from chance to perfect.
    """
    if not 0 <= accuracy <= 1:
        raise UserError(f"accuracy is a share between 0 and 1, got {accuracy}")
    if classes < 2 or images < FEW_IMAGES:
        return None
    chance = 1 / classes
    line = min(5 * chance, chance + (1 - chance) / 4)
    if accuracy >= line:
        return None
    return (
        f"zero-shot accuracy {accuracy:.1%} is near chance ({chance:.1%} with {classes:,} "
        "classes): check the order of labels and class names (cliquetta data doctor ROOT) and "
        "that the model's own preprocessing is used"
    )
