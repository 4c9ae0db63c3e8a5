"""Front ends of the schema (model/config/schema.py): configuration files of other systems, translated key by key.

No value is ignored silently. A key sets options, is accepted because it matches HAL's behaviour, results in a note that
it has no effect, or is refused.
"""
