"""Private parts of the base class: rejection and calibration beside zero-shot CLIP."""
