"""From a paused session back to pages the device can take."""
