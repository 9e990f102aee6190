"""Components for runner that live in a package of their own."""
