"""Applications of a model: planning, evaluation, conversion and reports."""
