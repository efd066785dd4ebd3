"""How one model is cut over several devices: by named dimension, by layer, by image region, by layer and time."""
