module fenka.io/e2e/kueue

go 1.26.6
