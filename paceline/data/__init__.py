"""The data room: which samples an update uses, exactly once, and how they get there in time.

`Ledger` decides the order, hands out each update's `Lease` and proves that every sample counted once. A `Feed`
(made by `open_feed`) turns positions of that order into batches; `Ahead` does so while the model still computes, and
`workers` do it in processes. `settings` reads what a script, or its DataLoader, asks for; `batch_values` goes through
batches of any class.
"""

from paceline.data.ahead import Ahead
from paceline.data.feed import Feed, open_feed
from paceline.data.ledger import Lease, Ledger

__all__ = ["Ahead", "Feed", "Lease", "Ledger", "open_feed"]
