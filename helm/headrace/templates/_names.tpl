{{/* Names, labels and addresses. */}}

{{- define "headrace.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/*
Beginning of all names, at most 26 characters: with "-gpuworker-", a pool of 15 characters and the hash
of a revision, a StatefulSet's labels then stay below 63. What is cut off is told apart by a digest.
*/}}
{{- define "headrace.fullname" -}}
{{- $name := include "headrace.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- $full = $full | replace "." "-" -}}
{{- if gt (len $full) 26 -}}
{{- $full = printf "%s-%s" ($full | trunc 17 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end }}

{{/* Labels that select a component's pods; takes a dict of root, component and, for a pool, pool. */}}
{{- define "headrace.selector" -}}
app.kubernetes.io/name: {{ include "headrace.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
headrace/pool: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The same labels as a selector in one line. */}}
{{- define "headrace.labelSelector" -}}
{{- $parts := list -}}
{{- range $key, $value := include "headrace.selector" . | fromYaml -}}
{{- $parts = append $parts (printf "%s=%s" $key $value) -}}
{{- end -}}
{{- join "," $parts -}}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: headrace
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* metadata of an object; takes a dict of root, component, name and perhaps pool, annotations. */}}
{{- define "headrace.metadata" -}}
{{- $annotations := mustMergeOverwrite (dict) (default (dict) .root.Values.commonAnnotations) (default (dict) .annotations) -}}
{{- $labels := include "headrace.labels" . | fromYaml -}}
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- toYaml (mustMerge $labels (default (dict) .root.Values.commonLabels)) | nindent 4 }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* The same with labels that only this object has; takes labels besides. */}}
{{- define "headrace.labelled" -}}
{{- $object := include "headrace.metadata" . | fromYaml -}}
{{- $_ := set $object.metadata "labels" (mustMerge $object.metadata.labels (default (dict) .labels)) -}}
{{- toYaml $object -}}
{{- end }}

{{- define "headrace.serviceAccount" -}}
{{- default (ternary (include "headrace.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{/* Whether pods of a component call the Kubernetes API; takes a dict of root and component. */}}
{{- define "headrace.callsKubernetes" -}}
{{- if or (eq .component "pool-controller") (and (eq .root.Values.discovery.type "kubernetes") (has .component (list "router" "scheduler"))) }}true{{ end -}}
{{- end }}

{{/* The account of a component's pods; takes a dict of root and component. */}}
{{- define "headrace.podAccount" -}}
{{- $account := include "headrace.serviceAccount" .root -}}
{{- if and (include "headrace.callsKubernetes" .) .root.Values.serviceAccount.create -}}
{{- printf "%s-%s" $account .component -}}
{{- else -}}
{{- $account -}}
{{- end -}}
{{- end }}

{{/* The whole name of an image; takes a dict of root and image. */}}
{{- define "headrace.image" -}}
{{- $registry := default .image.registry .root.Values.images.registry -}}
{{- $path := ternary (printf "%s/%s" $registry .image.repository) .image.repository (ne $registry "") -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $path .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $path (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end }}

{{/* Name of a pool's objects; takes a dict of root and pool. */}}
{{- define "headrace.poolName" -}}
{{- printf "%s-gpuworker-%s" (include "headrace.fullname" .root) .pool -}}
{{- end }}

{{/* What comes behind a Service's name in the cluster's DNS. */}}
{{- define "headrace.domain" -}}
{{- .Release.Namespace }}.svc{{ with .Values.clusterDomain }}.{{ . }}{{ end -}}
{{- end }}
