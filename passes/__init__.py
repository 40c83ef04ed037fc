"""The compiler: match → insert_guards → commute_gather → unswitch → verify → lower, one pass a file, in that order.

Imports as `sfi_compile.passes`. A pass may import site, ops, cost_model, compat and its neighbours `base`, `dataflow`,
`axes` and `reads`; no pass imports another pass, and nothing here runs a model.
"""
