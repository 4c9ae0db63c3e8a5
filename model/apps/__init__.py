"""Applications of a model: planning, evaluation, conversion, reports and serving."""
