"""Which tile a kernel gets: tables tuned on a device, or a heuristic."""
