"""The tiny CLIP, its classes and its images; a test that changes them builds its own."""

from cliquetta.prompts.classes import ClassPrompts
from tests._helpers.tiny import TINY_NAMES, build_tiny_clip, make_tiny_images

TINY = build_tiny_clip()
TINY_PROMPTS = ClassPrompts(TINY_NAMES, ("a photo of a {}.", "a sketch of a {}."))
TINY_IMAGES = make_tiny_images()
