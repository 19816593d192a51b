"""The SGLang backend."""
