"""A loaded model that generates."""
