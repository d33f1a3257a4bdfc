"""Strings that tokenisers disagree on when one of them is wrong."""

import random
import unicodedata

from cliquetta.prompts.catalogue import class_names, templates

ODD = [
    "",
    " ",
    "a photo of a",
    "A  Photo\tof\r\n a\u00a0\u2003dog.  ",
    "don't won't I'm you're they've she'll he'd it's 'tis o'clock DON'T y'all'd've",
    "don\u2019t \u2018quoted\u2019 \u201cdouble\u201d",
    "0 12 345 6,789.01 1e-5 ½ ² Ⅷ ٣٤ 三",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u212b stra\u00dfe STRASSE \u0130stanbul",
    "fish &amp; chips &lt;b&gt; &amp;amp;lt; &nbsp; &eacute; &#233; &#x1F600; &unknown;",
    "schÃ¶n â€œmojibakeâ€\x9d l&rsquo;humanitÃ©",
    "😀 👩‍👩‍👧‍👦 🇨🇭 👍🏽 ❤️ #️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "日本語 中文 한국어 русский العربية עברית हिन्दी ไทย ქართული",
    "<|startoftext|> a <|endoftext|> b <|EndOfText|>",
    "'ſ 'ſt K K ſ ﬁ ǆ Σς",
    "zero\u200bwidth \ufeffbom soft\u00adhyphen \u202ebidi\u202c \x1c\x1d\x1e\x1f \x85 \u2028",
    "!!!??? ... --- ___ a_b snake_case CamelCase path/to/file.jpg http://example.org/?q=1&r=2",
    "\x00\x01\x7f control \x1b[31mred\x1b[0m",
    "a" * 300,
    "ab" * 90 + " " + "xyz" * 50,
    "\ud800 lone surrogate",
    "</w> a</w> b </w",
]


def words_in_templates() -> list[str]:
    """All ImageNet names, each in one of the 80 templates."""
    forms = templates("openai-80")
    names = class_names("imagenet")
    return [forms[i % len(forms)].replace("{}", name) for i, name in enumerate(names)]


def random_strings(count: int, *, seed: int, old_unicode: bool) -> list[str]:
    """Random strings over all planes; ``old_unicode`` keeps to characters that every
    Unicode table since 3.2 holds, as libraries are built with different ones."""
    rng = random.Random(seed)
    blocks = [
        (32, 127),
        (32, 127),
        (0, 256),
        (0x100, 0x600),
        (0x600, 0x3100),
        (0x3100, 0xFFFF),
    ]
    blocks += [(0x1F300, 0x1FB00), (0x10000, 0x10FFFF)]
    table = unicodedata.ucd_3_2_0 if old_unicode else unicodedata
    left_out = (
        {"Cs", "Cn", "Co"} if old_unicode else {"Cs"}
    )  # surrogates, unassigned, private
    letters = [
        [
            char
            for char in map(chr, range(*block))
            if table.category(char) not in left_out
        ]
        for block in blocks
    ]
    letters = [chars for chars in letters if chars]  # Unicode 3.2 had no emoji
    pool = [
        "'s",
        "'LL",
        " ",
        "  ",
        "\t",
        "&amp;",
        "&#39;",
        "the",
        "Photo",
        "3",
        "😀",
        "e\u0301",
    ]

    def piece() -> str:
        return (
            rng.choice(pool) if rng.random() < 0.3 else rng.choice(rng.choice(letters))
        )

    return ["".join(piece() for _ in range(rng.randrange(1, 24))) for _ in range(count)]
