"""What reproduces the papers and gains no feature; nothing else imports it."""
