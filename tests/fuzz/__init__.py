"""A fuzzer of the command line: odd files and odd arguments, and what must hold of every answer.

``odd`` makes odd things, ``places`` are the folders that they are put into, ``targets`` draws
inputs, ``worker`` runs them in a child that may die, ``rules`` judges the answers.

The suite runs a sample, and all inputs that ever broke something (``corpus``); with ``--all`` many.
"""
