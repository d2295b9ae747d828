"""Local SGD: islands of ranks that train apart and exchange weights at times, over links that may be slow."""
