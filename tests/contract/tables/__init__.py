"""Tables of rows, each run under several strategies, with a page in the documentation that has every outcome."""
