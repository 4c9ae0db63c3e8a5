"""How tensors and sequences are sharded over ranks. There is no training loop here."""
