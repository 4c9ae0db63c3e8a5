"""Front ends of the schema (model/config/schema.py): configuration files of other systems, translated key by key.

No value is ignored silently: a key sets options, or is checked to ask for what HAL does anyway, or becomes a note that
it has no effect, or is refused.
"""
