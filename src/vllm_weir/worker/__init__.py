"""What runs in each worker: discovery of hook points, plans, taps, and the transfer of rows."""
