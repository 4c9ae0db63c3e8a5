"""Configuration files as mappings with dotted keys."""


def nested(keys):
    """{"a.b": 1} as {"a": {"b": 1}}."""
    tree = {}
    for key, value in keys.items():
        node = tree
        *folders, last = key.split(".")
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = value
    return tree
