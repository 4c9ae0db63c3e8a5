"""Front ends of the one schema (model/config.py): files in other systems' words, translated key by key.

No value is dropped in silence: every key of a file becomes options, or is checked to say what HAL does anyway, or is
told to the user as having no effect, or is refused.
"""
