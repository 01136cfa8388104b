"""Before a run: what each sketch_dim costs in noise, memory and FLOPs, and which one to take (`dprc plan`).

Nothing here trains, and no weights are needed: shapes and the accountant tell it all.
"""
