# SPDX-License-Identifier: BSD-3-Clause
"""Makes the backend name "trueshard" known to torch.distributed; the library itself is loaded when a group is made.

Called by torch's entry points, `torch.backends` at the end of `import torch` among them: it must stay cheap and must not raise.
"""


def create(options, process_group_options):
    import trueshard

    return trueshard.create_backend(options, process_group_options)


def register():
    import torch.distributed as dist

    if dist.is_available() and "TRUESHARD" not in dist.Backend._plugins:
        dist.Backend.register_backend("trueshard", create, extended_api=True, devices=["cpu"])
