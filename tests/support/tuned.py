"""GPUs and a tile, for tests of tuned tiles. A GPU: fields of the package's DeviceSpec."""

H200 = {"num_sms": 132, "shared_memory": 232448, "hopper": True, "capability": (9, 0), "bandwidth": 4917}
A100 = {"num_sms": 108, "shared_memory": 166912, "wide_tiles": False, "capability": (8, 0)}
GPU = "Some GPU"
TILE = {"block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2}
