"""The compiler: specialise → match → insert_guards → commute_gather → unswitch → verify → lower, one pass a file.

Imports as `sfi_compile.passes`. A pass may import config, site, ops, compat and its neighbours `base`, `dataflow`,
`axes` and `reads`; no pass imports another pass, and nothing here runs a model.
"""
