"""What a trained or planned model is used for: planning, evaluation, conversion, reports, serving."""
