"""What a request may ask of its sampler, and what checks it before anything native runs."""
