"""Private names and patches of torch, Lightning and DeepSpeed: a package for each library, a module for each idea.

No other part of this package uses a private name of these libraries or replaces anything in them. Every module declares
what it uses in `NAMES`; `checks` compares the entries with the installed versions before training.
"""
