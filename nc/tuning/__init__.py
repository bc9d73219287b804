"""`nc.tune`: trade accuracy for latency by measurement, operator group by operator group."""
