"""A Block runs beside a forward pass of any `torch.nn.Module`."""
