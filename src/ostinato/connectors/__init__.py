"""KV that comes from elsewhere and goes elsewhere: host memory, disk, another process."""
