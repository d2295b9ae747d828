"""Load pickles without running code from them."""
