"""Loading pickles without running code from them."""
