"""Rows on their way out: views, receipts and tensors cut ahead."""
