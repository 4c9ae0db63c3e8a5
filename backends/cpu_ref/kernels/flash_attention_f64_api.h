// Makes the kind known to hal_flash_attention_forward and _backward, once, before a call with its dtype.
void hal_flash_attention_add_f64(void);
