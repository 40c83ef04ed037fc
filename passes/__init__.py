"""The compiler: specialise → canonicalise → match → insert_guards → commute_gather → unswitch → verify → lower.

One pass a file, and the rules that passes share: `dataflow` and `shapes`; how attention is written (`chains`,
`links`, `products`, `heads`, `flex`, `assemble`); what it reads (`along`, `paths`, `axes`, `reads`, `writes`); the
model's linear layers (`linears`). Imports as `sfi_compile.passes`. A room here may import config, site, ops, kernels'
limits, compat and those rules; no pass imports another pass, and nothing here runs a model.
"""
