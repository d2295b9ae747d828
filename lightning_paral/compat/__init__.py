"""Private names and patches of torch, Lightning and DeepSpeed: one package per library, one module per topic.

No other part of this package uses a private name of these libraries, or replaces anything in them. Every module lists
the private names that it uses in `NAMES`; `checks` looks them up in the installed versions before training.
"""
