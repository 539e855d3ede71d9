// Reads the JSON of `fenka usage -o opencost` as OpenCost's own messages, and prints what OpenCost would add up.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/opencost/opencost/core/pkg/model/pb"
	"google.golang.org/protobuf/encoding/protojson"
)

func main() {
	var responses []json.RawMessage
	if err := json.NewDecoder(os.Stdin).Decode(&responses); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, text := range responses {
		var response pb.CustomCostResponse
		// An unknown field, or one of another type, is an error.
		if err := protojson.Unmarshal(text, &response); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		total := 0.0
		for _, cost := range response.Costs {
			total += float64(cost.BilledCost)
		}
		fmt.Println(response.Start.AsTime().Format("2006-01-02"), response.Currency, response.Domain,
			len(response.Costs), fmt.Sprintf("%.4f", total))
	}
}
