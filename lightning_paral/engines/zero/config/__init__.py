"""The strategy's options, and the DeepSpeed configuration made of them."""
